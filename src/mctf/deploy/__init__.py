"""Files for other runtimes: models exported to ONNX, OpenVINO, AOTInductor and torch.export, then checked."""

"""Files for other runtimes: fused models exported to ONNX, OpenVINO, AOTInductor and torch.export, checked and loaded."""

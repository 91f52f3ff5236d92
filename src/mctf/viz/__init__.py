"""Pictures of fused patches, contact sheets, plots over cost, and the content of `mctf demo`."""

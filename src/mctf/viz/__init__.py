"""Pictures of fused patches, contact sheets, plots over cost, the content of `mctf demo`, the page of the playground."""

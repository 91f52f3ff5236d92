"""Pictures of fused patches, contact sheets, plots over cost; the content of the demo, the page of the playground."""

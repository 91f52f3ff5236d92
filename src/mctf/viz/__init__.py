"""What people look at: pictures of fused patches, and the photographs the demo shows them on."""

"""Millions of images to vectors: sources, the `Embedder`, resumable jobs on one machine or a Ray cluster."""

"""What fusing saves and what it costs: FLOPs, fidelity, throughput."""

"""What token fusion saves and what it costs: FLOPs, fidelity to the unfused model, throughput."""

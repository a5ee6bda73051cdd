"""Find the fastest plan for a model, a machine and a memory cap, and say why it is the best."""

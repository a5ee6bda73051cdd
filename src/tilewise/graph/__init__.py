"""From a model to a parallel model: capture, graph, lower."""

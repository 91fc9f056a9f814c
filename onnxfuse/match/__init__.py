"""Finding where a rule's pattern occurs in a graph, and why it does not."""

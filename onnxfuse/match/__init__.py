"""Finding where a rule's pattern occurs in a graph, and why it does not."""

from onnxfuse.match import predicates, predicates_attention, predicates_weights  # noqa: F401 - registers the named predicates

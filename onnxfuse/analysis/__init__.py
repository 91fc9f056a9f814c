"""What an index or mask subgraph computes, found symbolically instead of by its spelling."""

"""Bring a model to the normal form that rules may assume. Results, interface and dtypes stay exactly what they were.

The canonical form:

* no `Constant`, `Identity`, inference `Dropout` or no-op `Cast`, `Reshape`, `Expand`, `Slice`, `Transpose`, `Concat`, …
* what can be known before the model runs is an initializer, if that does not make the file larger;
* targets of `Reshape` and `Expand` and bounds of `Slice` are initializers wherever 0, −1, 1 and "to the end" can say
  them; a `Slice` leaves steps of 1 out;
* `Flatten` is a `Reshape`; neighbouring `Unsqueeze`s, `Squeeze`s, `Reshape`s and `Transpose`s are one; `Unsqueeze` and
  `Squeeze` stay, with non-negative sorted axes; so does a `Reshape` of floats that only inserts ones (it may split
  heads), while one of integers or bools is an `Unsqueeze`;
* a reduction's axes are non-negative and sorted; a dimension that is reduced and put back is kept (`keepdims`);
* no sequence whose members are known;
* an operand is not expanded to a shape that the op would broadcast it to;
* an operand of a `Concat` is not sliced from it;
* parts of a product's columns are Slices of it; a constant added to all of them is added before they are split;
* a matrix product that worked on flattened leading dimensions works on the tensor as it was; such a `Gemm` is `MatMul`
  and `Add`;
* the constant operand of a commutative op is the second; a one-element constant has rank 0 where that changes no shape;
* a `Transpose` of a constant is folded, unless the constant is large and has other readers (tied embeddings);
* equal computations are made once, also those that only compute the same sizes; sizes are read from graph inputs;
* nothing is dead.

What stays as it was spelled: `Div` by a constant, `Sub`, `Neg`, `Pow(x, 2)` or `Mul(x, x)`, `axis` attributes' signs.
"""

from onnxfuse.graph.canonicalize.driver import PASSES, canonicalize

run = canonicalize

__all__ = ["PASSES", "canonicalize", "run"]

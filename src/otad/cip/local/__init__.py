"""Convex integration on the neighbors of each query: Algorithm 2 of the paper, one file per step.

1. find the K nearest bank points              `otad.search.neighbors`
2. find the potentials of eq. (2)              `potentials`, from the inner products of `products`
3. relax L if there are none                   `relax`
4. solve the quadratic program of eq. (3)      `simplex_qp`
5. compute the feature z' and its gradient     `feature`

`solver` calls steps 2 to 5. `solve_torch` runs steps 2 to 4 for a batch, but mostly compiled code
does: on a CPU by `read_compiled` and `solve_compiled`, and on a GPU by `stream_triton`, which reads
neighbors without gathering them, and by the kernel `otad.cip.kernels.row`."""

"""Convex integration on the neighbors of each query: Algorithm 2 of the paper, one file per step.

1. find the K nearest bank points        `otad.search.neighbors`
2. potentials of eq. (2)                 `potentials`   from the inner products of `products`
3. relax L where none exist              `relax`
4. quadratic program of eq. (3)          `simplex_qp`
5. feature z' and its gradient           `feature`

`solver` calls steps 2 to 5; `solve_torch` runs 2 to 4 for a batch, on a GPU one kernel of
`otad.cip.kernels` does, which `stream_triton` feeds without gathering neighbors."""

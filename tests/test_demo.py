"""The example in the plane: a bank, and a map that passes through it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from otad import demo
from otad.cip import CipProblem, ExactCip


def test_the_map_passes_through_every_pair_of_the_bank() -> None:
    example = demo.make_example()
    nearest = torch.cdist(example.inputs, example.inputs).topk(demo.NEIGHBORS, largest=False)
    problem = CipProblem(
        example.inputs,
        example.inputs[nearest.indices],
        example.features[nearest.indices],
        smoothness=demo.SMOOTHNESS,
    )
    image = ExactCip()(problem).image
    torch.testing.assert_close(image, example.features, rtol=0, atol=1e-6)


def test_the_grid_goes_where_its_nearest_pairs_allow() -> None:
    example = demo.make_example()
    grid = demo.interpolate_grid(example, lines=9, every=2)
    assert grid.nodes.shape == grid.images.shape == (17, 17, 2)
    assert np.all(grid.smoothness >= demo.SMOOTHNESS)
    # Each image is a convex combination of the features of the nearest points.
    nodes = torch.from_numpy(grid.nodes).reshape(-1, 2)
    nearest = torch.cdist(nodes, example.inputs).topk(demo.NEIGHBORS, largest=False).indices
    near, images = example.features[nearest], torch.from_numpy(grid.images).reshape(-1, 2)
    assert bool((images >= near.amin(1) - 1e-9).all())
    assert bool((images <= near.amax(1) + 1e-9).all())


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    demo.draw_map(tmp_path / "new" / "map.png", seed=3)
    with Image.open(tmp_path / "new" / "map.png") as picture:
        assert picture.size[0] > 1000

"""Draw the two ways to resize a camera's pictures side by side: LeRobot's and openpi's (docs/openpi.md).

    python examples/two_resizes.py --root path/to/dataset --camera observation.images.top --frame 100 --output two.png

The dataset is any LeRobot dataset with pictures, larger than 224 pixels. It needs the extras `policy` and `report`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from pi0_fast.data.reader import open_dataset
from pi0_fast.model.images import prepare_images
from pi0_fast.training.frames import FrameDataset


def main() -> None:
    """Read a frame, resize it both ways, draw, and print how far they are apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="directory of the dataset")
    parser.add_argument("--camera", default=None, help="feature of the pictures (default: the first camera)")
    parser.add_argument("--frame", type=int, default=0, help="number of the frame")
    parser.add_argument(
        "--zoom", type=int, nargs=2, default=(100, 84), help="upper left corner of the part that is shown large"
    )
    parser.add_argument("--output", type=Path, default=Path("two_resizes.png"))
    options = parser.parse_args()
    reader = open_dataset("local/dataset", root=options.root)
    camera = options.camera or reader.camera_keys[0]
    frame = FrameDataset(reader, chunk_size=1, camera_keys=[camera])[options.frame][camera]
    plain, smooth = (
        (prepare_images(frame, antialias=antialias, key=camera)[0].permute(1, 2, 0).numpy() + 1) / 2
        for antialias in (False, True)
    )
    difference = np.abs(plain - smooth).max(axis=2)
    print(
        f"{camera}, frame {options.frame}, {list(frame.shape)}: the mean difference is "
        f"{255 * np.abs(plain - smooth).mean():.1f} of 255 levels, the largest {255 * difference.max():.0f}"
    )
    row, column = options.zoom
    part = (slice(row, row + 56), slice(column, column + 56))
    figure, axes = plt.subplots(1, 3, figsize=(7.4, 2.6), layout="constrained")
    for axis, picture, title in zip(axes, (plain, smooth), ("LeRobot: bilinear", "openpi: antialiased"), strict=False):
        axis.imshow(picture[part], interpolation="nearest")
        axis.set_title(title, fontsize=8)
    shown = axes[2].imshow(difference, cmap="magma", vmin=0)
    axes[2].set_title("difference, whole frame", fontsize=8)
    figure.colorbar(shown, ax=axes[2])
    for axis in axes:
        axis.axis("off")
    figure.savefig(options.output, dpi=100)


if __name__ == "__main__":
    main()

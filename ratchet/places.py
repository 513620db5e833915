"""Where the product's own files lie, in a clone and in an installed wheel alike."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parent
"""The folder that holds our packages."""
DATA = PACKAGE / "data"
"""The seedling, the symbolic templates and the adversarial answers."""
PRESETS = PACKAGE / "presets"

"""The version of asyncrl, and the folder of its package. No file below the package's root imports the root for them."""

from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).parent

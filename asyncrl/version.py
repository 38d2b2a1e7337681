"""The version of asyncrl, and the folder of its package. Other files of the package import them from here, not from
`asyncrl` itself."""

from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).parent

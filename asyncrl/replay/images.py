"""The images of trajectories: the members of a group show the same ones, and the store keeps each once for all of them.

An image is kept under its group and its SHA-256, from the first trajectory that shows it to the last that is forgotten.
All of that happens in the transaction of the trajectory, so that a kill leaves neither a trajectory without its images
nor an image without a trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

from asyncrl.errors import RefusedError, StoreError
from asyncrl.replay.transaction import Transaction
from asyncrl.types import MAX_IMAGES, Trajectory
from asyncrl.wire import Buffer

TABLES = ("images", "image_users", "images_of")
"""Image -> its bytes; image -> trajectories that show it (many); trajectory -> images that it shows (many)."""
MULTIPLE = ("image_users", "images_of")
MAX_IMAGE_BYTES = 32 << 20
WITHOUT_IMAGES = "without_images"
"""The counter of trajectories in an imported store whose images the exported files did not have."""


def read_images(frames: Sequence[Buffer], trajectory: Trajectory) -> dict[bytes, Buffer]:
    """The images in the frames after a `trajectory`, by their digests. Raises RefusedError: one is too large, or is
    none that the trajectory shows; or it shows too many."""
    names = set(trajectory.image_names)
    if (count := len(trajectory.image_digests)) > MAX_IMAGES:
        raise RefusedError(f"{trajectory.id} shows {count} images; at most {MAX_IMAGES} are taken")
    found: dict[bytes, Buffer] = {}
    for frame in frames:
        if (size := len(frame)) > MAX_IMAGE_BYTES:
            raise RefusedError(f"an image of {trajectory.id} has {size} bytes; at most {MAX_IMAGE_BYTES} are taken")
        name = sha256(frame).digest()
        if name not in names:
            raise RefusedError(f"an image came with {trajectory.id} that it does not show: {name.hex()}")
        found[name] = frame
    return found


def lacks_images(tx: Transaction, trajectory: Trajectory, sent: Mapping[bytes, Buffer]) -> bool:
    """True if the trajectory shows an image that is neither stored for its group nor sent with it."""
    group = trajectory.group_id
    return any(name not in sent and not tx.size("images", _key(group, name)) for name in trajectory.image_names)


def keep_images(tx: Transaction, trajectory: Trajectory, sent: Mapping[bytes, Buffer]) -> None:
    """Keep the images of a trajectory that is stored now."""
    for name in dict.fromkeys(trajectory.image_names):
        key = _key(trajectory.group_id, name)
        if not tx.size("images", key):
            tx.put_bytes("images", key, sent[name])
        tx.add_member("image_users", key, trajectory.id)
        tx.add_member("images_of", trajectory.id, key)


def forget_images(tx: Transaction, trajectory: str) -> None:
    """A trajectory is forgotten, and with it the images that no other one shows."""
    for key in tx.members("images_of", trajectory):
        tx.remove_member("images_of", trajectory, key)
        tx.remove_member("image_users", key, trajectory)
        if not tx.members("image_users", key):
            tx.delete("images", key)


def image_of(tx: Transaction, trajectory: str, group: str, name: bytes) -> memoryview:
    """The bytes of an image that a trajectory of `group` shows. Raises RefusedError: it is not there, or damaged."""
    try:
        found = tx.get_bytes("images", _key(group, name))
    except StoreError as error:
        raise RefusedError(str(error)) from error
    if found is None:
        raise RefusedError(f"the image {name.hex()} of {trajectory} is not there: it was forgotten, or imported")
    return found


def _key(group: str, name: bytes) -> str:
    return f"{group}/{name.hex()}"

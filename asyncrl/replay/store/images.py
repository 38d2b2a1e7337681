"""Stores the images of trajectories. The members of a group mostly share images, so the store keeps each image once per
group.

The key of an image is its group and its SHA-256. The image is stored with the first trajectory that contains it, and
deleted with the last one, in the same transaction as the trajectory. So even after a kill, no trajectory lacks its
images, and no image is left without a trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

from asyncrl.errors import RefusedError, StoreError
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import MAX_IMAGES, Trajectory
from asyncrl.wire import Buffer

TABLES = ("images", "image_users", "images_of")
"""The tables for images.

- images: image -> its bytes
- image_users: image -> trajectories that contain it (many)
- images_of: trajectory -> its images (many)
"""
MULTIPLE = ("image_users", "images_of")
MAX_IMAGE_BYTES = 32 << 20
WITHOUT_IMAGES = "without_images"
"""The counter of trajectories in an imported store whose images were not in the exported files."""


def read_images(frames: Sequence[Buffer], trajectory: Trajectory) -> dict[bytes, Buffer]:
    """Read the images in the frames that follow a `trajectory`. Maps digests to images. Raises RefusedError: an image
    is too large or not in the trajectory, or the trajectory has too many images."""
    names = set(trajectory.image_names)
    if (count := len(trajectory.image_digests)) > MAX_IMAGES:
        raise RefusedError(f"{trajectory.id} shows {count} images; at most {MAX_IMAGES} are taken")
    found: dict[bytes, Buffer] = {}
    for frame in frames:
        if (size := len(frame)) > MAX_IMAGE_BYTES:
            raise RefusedError(f"an image of {trajectory.id} has {size} bytes; at most {MAX_IMAGE_BYTES} are taken")
        name = sha256(frame).digest()
        if name not in names:
            raise RefusedError(f"{trajectory.id} came with an image that is not part of it: {name.hex()}")
        found[name] = frame
    return found


def lacks_images(tx: Transaction, trajectory: Trajectory, sent: Mapping[bytes, Buffer]) -> bool:
    """True if the trajectory has an image that is neither stored for its group nor sent with it."""
    group = trajectory.group_id
    return any(name not in sent and not tx.size("images", _key(group, name)) for name in trajectory.image_names)


def keep_images(tx: Transaction, trajectory: Trajectory, sent: Mapping[bytes, Buffer]) -> None:
    """Store the images of a trajectory."""
    for name in dict.fromkeys(trajectory.image_names):
        key = _key(trajectory.group_id, name)
        if not tx.size("images", key):
            tx.put_bytes("images", key, sent[name])
        tx.add_member("image_users", key, trajectory.id)
        tx.add_member("images_of", trajectory.id, key)


def forget_images(tx: Transaction, trajectory: str) -> None:
    """Delete the images that only this trajectory contains."""
    for key in tx.members("images_of", trajectory):
        tx.remove_member("images_of", trajectory, key)
        tx.remove_member("image_users", key, trajectory)
        if not tx.members("image_users", key):
            tx.delete("images", key)


def image_of(tx: Transaction, trajectory: str, group: str, name: bytes) -> memoryview:
    """The bytes of an image in a trajectory of `group`. Raises RefusedError: the image is missing or damaged."""
    try:
        found = tx.get_bytes("images", _key(group, name))
    except StoreError as error:
        raise RefusedError(str(error)) from error
    if found is None:
        raise RefusedError(f"the image {name.hex()} of {trajectory} is missing: it was deleted, or not imported")
    return found


def _key(group: str, name: bytes) -> str:
    return f"{group}/{name.hex()}"

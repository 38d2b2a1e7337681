"""verl's batches, and the conversion of asyncrl's trajectories to them and back.

In reading order:
- `protocol.py`: the batch type `DataProto`. Its parts are `tensors.py` (named tensors), `nested.py` (rows of different
  lengths), `fields.py` (checks of fields), `rows.py` (choosing and joining rows) and `merging.py`
- `batch_dimensions.py`, `padding.py`, `auto_padding.py`, `gathering.py`: verl's functions on batches
- `to_batch.py`, `from_batch.py`: from trajectories to a batch, and back
- `packed.py`: from a batch to the input of asyncrl's algorithms
- `storage.py`, `parquet.py`, `tensordicts.py`: batches as files and as TensorDicts
"""

"""Task files: reading verl's Parquet layout, converting published data sets."""

"""Data types and classes of other trainers, so that code written for them works here."""

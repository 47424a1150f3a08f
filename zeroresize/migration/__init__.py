"""Migration: other ranks compute a straggler's columns, exactly (paper, section IV)."""

"""Layers over the stages of a pipeline: who should have which, decided from plain numbers."""

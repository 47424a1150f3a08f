"""Benchmarks, studies and checks of the project; Ctrl-C ends each as it ends the examples."""

import vit_examples  # noqa: F401 - which ends programs so

"""The console command ``zeroresize``, and all that prints; nothing else of the package imports it."""

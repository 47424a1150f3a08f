"""How fast ranks are, and how sure that is, from what they measured.

Before the exchange, of one rank: ``estimator``, with ``cost_curve``. After it, of the group: ``curves``, ``spells``,
``communication``, ``calibration_steps``. Both speak in ``times``.
"""

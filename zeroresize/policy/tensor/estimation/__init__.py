"""How fast ranks are, and how sure that is, from what they measured.

Before the exchange, of one rank: ``estimator``, ``change_of_level``, ``part_noise``, ``executed_products``. After it,
of the group: ``curves``, ``spells``, ``communication``, ``calibration_steps``. Both speak in ``times``.
"""

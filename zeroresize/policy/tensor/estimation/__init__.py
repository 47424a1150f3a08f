"""How fast ranks are, and how sure that is, from what they measured."""

"""Files, values and saved states, checked and written with care."""

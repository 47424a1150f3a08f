"""Moving what ranks hold: from one layout to another, planned purely and carried out at once."""

"""Files and hub data sets as rows, and what is made of them."""

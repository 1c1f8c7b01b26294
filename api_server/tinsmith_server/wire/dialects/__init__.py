"""The dialects of other makers: their requests and answers, and what is asked for in all of them."""

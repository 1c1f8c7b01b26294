"""The HTTP layer. A route parses the request, calls one service, and translates the answer.

There is one file for each area.
"""

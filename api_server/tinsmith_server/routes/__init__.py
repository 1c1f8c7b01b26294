"""HTTP only: parse, call one service, translate the answer. One file per area."""

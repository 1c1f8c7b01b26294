"""The parts that all routes share: bodies, keys, middleware, errors, and the OpenAPI document."""

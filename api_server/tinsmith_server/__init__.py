"""The API server: speaks the Tinker protocol and maps it onto RPCs of workers."""

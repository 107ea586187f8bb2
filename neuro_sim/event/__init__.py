"""The event engine's internals: `engine.EventDecoder` is the way in, docs/engine.md explains layout and speed."""

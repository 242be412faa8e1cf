"""The Open Inference Protocol, version 2, over HTTP and gRPC."""

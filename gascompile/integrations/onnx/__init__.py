"""ONNX models: their graphs as modules of ATen ops, with weights read in place."""

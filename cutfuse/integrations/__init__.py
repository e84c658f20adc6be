"""Other libraries' language-model heads by cutfuse: `liger` has a drop-in, `transformers` a change of a model's loss.

Each module is imported by its name, as `import cutfuse.integrations.liger`.
"""

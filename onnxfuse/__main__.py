"""`python -m onnxfuse`."""

from onnxfuse.cli.main import main

if __name__ == "__main__":
    main()

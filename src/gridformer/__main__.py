"""`python -m gridformer`, for torchrun and for environments without the script on their path."""

from gridformer.cli.app import main

if __name__ == "__main__":
    main()

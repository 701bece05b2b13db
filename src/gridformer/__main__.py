"""`python -m gridformer`, for torchrun's -m."""

from gridformer.cli.app import main

if __name__ == "__main__":
    main()

"""The Kubernetes API as Berth needs it: plain JSON in and out, one error hierarchy, bounded waits."""

"""Many ranks: who they are, what they agree on, and how one that fails takes the others along."""

"""Many ranks: their reports, added up along a tree, and the rank that slows a job down."""

"""What has become of an operation or a sample: polls that are held until there is an answer."""

"""What people grep, script and configure, compared with a committed listing."""

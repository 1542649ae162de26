"""Monitors: each covers one concern and connects a pure package to the running supervisor. This
package never imports the supervisor."""

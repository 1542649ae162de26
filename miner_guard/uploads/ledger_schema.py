"""The ledger's tables."""

from __future__ import annotations

SCHEMA = """
CREATE TABLE IF NOT EXISTS decisions (
  id TEXT PRIMARY KEY, wall REAL NOT NULL, outer_step INTEGER, inner_step INTEGER, kind TEXT,
  allowed INTEGER, shadow INTEGER, reason TEXT, verdicts TEXT, record TEXT, document TEXT);
CREATE TABLE IF NOT EXISTS inputs (id TEXT PRIMARY KEY, wall REAL NOT NULL, document TEXT);
CREATE TABLE IF NOT EXISTS uploads (
  id INTEGER PRIMARY KEY, wall REAL NOT NULL, decision_id TEXT, tag TEXT, outer_step INTEGER,
  inner_step INTEGER, kind TEXT, bytes INTEGER, seconds REAL, attempts INTEGER, checksum TEXT,
  outcome TEXT, error TEXT, verified REAL);
CREATE TABLE IF NOT EXISTS repo_age (
  id INTEGER PRIMARY KEY, wall REAL NOT NULL, age_s REAL, outer_step INTEGER, inner_step INTEGER,
  size_bytes INTEGER, checksum TEXT, reason TEXT);
CREATE TABLE IF NOT EXISTS incidents (
  id INTEGER PRIMARY KEY, wall REAL NOT NULL, label TEXT, cause TEXT, fix TEXT, excerpt TEXT,
  rank INTEGER);
CREATE TABLE IF NOT EXISTS restarts (
  id INTEGER PRIMARY KEY, wall REAL NOT NULL, cause TEXT, attempt INTEGER, wait_s REAL);
CREATE INDEX IF NOT EXISTS decisions_wall ON decisions (wall);
CREATE INDEX IF NOT EXISTS repo_age_wall ON repo_age (wall);
"""
VERSION = 1

TABLES = ("decisions", "inputs", "uploads", "repo_age", "incidents", "restarts")
